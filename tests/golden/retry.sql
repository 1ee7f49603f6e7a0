INSERT INTO task (task_id, task_type, params, created_at, run_at, attempts, last_error, ticket, coalesce_key) OVERRIDING SYSTEM VALUE
SELECT restored.task_id, restored.task_type, restored.params, restored.created_at, restored.run_at, restored.attempts, restored.last_error, restored.ticket, restored.coalesce_key
FROM jsonb_populate_record(CAST(%(pgtask_row)s::VARCHAR AS task), jsonb_build_object('attempts', %(pgtask_attempts)s::INTEGER, 'last_error', %(pgtask_last_error)s::VARCHAR, 'run_at', statement_timestamp() + %(pgtask_delay)s)) AS restored
