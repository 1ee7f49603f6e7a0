INSERT INTO dead_task (task_id, task_type, params, created_at, attempts, last_error, coalesce_key, priority, reason)
SELECT restored.task_id, CAST(CAST(restored.task_type AS TEXT) AS TEXT) AS task_type, restored.params, restored.created_at, restored.attempts, restored.last_error, restored.coalesce_key, restored.priority, %(pgtask_reason)s::VARCHAR AS anon_1
FROM jsonb_populate_record(CAST(%(pgtask_row)s::VARCHAR AS task), jsonb_build_object('attempts', %(pgtask_attempts)s::INTEGER, 'last_error', %(pgtask_last_error)s::VARCHAR)) AS restored
