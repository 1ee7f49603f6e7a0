SELECT task.task_id, CAST(task.task_type AS TEXT) AS task_type
FROM task
WHERE task.task_type = ANY (CAST(%(types)s::TEXT[] AS TEXT[])) AND (task.run_at IS NULL OR task.run_at <= statement_timestamp())
ORDER BY task.run_at NULLS FIRST, task.task_id
LIMIT %(param_1)s::INTEGER FOR UPDATE SKIP LOCKED
