SELECT dead_task.task_id
FROM dead_task
WHERE dead_task.task_id = ANY (%(ids)s::BIGINT[])
ORDER BY dead_task.task_id FOR UPDATE SKIP LOCKED
