SELECT task.task_id
FROM task
WHERE task.task_type = CAST(%(task_type)s::VARCHAR AS TEXT) AND task.coalesce_key = %(coalesce_key)s::BIGINT AND task.params = CAST(%(params)s::VARCHAR AS JSONB) AND (task.run_at IS NULL OR task.run_at <= statement_timestamp() + %(delay)s)
LIMIT %(param_1)s::INTEGER FOR KEY SHARE SKIP LOCKED
