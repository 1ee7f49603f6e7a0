SELECT EXISTS (SELECT *
FROM task
WHERE task.task_id = %(task_id)s::BIGINT) AS anon_1
