SELECT dead_task.task_id
FROM dead_task
WHERE dead_task.task_id > %(after)s::BIGINT AND CAST(dead_task.task_type AS TEXT) = %(param_1)s::VARCHAR
ORDER BY dead_task.task_id
LIMIT %(param_2)s::INTEGER FOR UPDATE SKIP LOCKED
