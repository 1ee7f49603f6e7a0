INSERT INTO jobs.enum_job (task_id, params, created_at, task_type, run_at, attempts, last_error, ticket, coalesce_key) OVERRIDING SYSTEM VALUE
SELECT restored.task_id, restored.params, restored.created_at, restored.task_type, restored.run_at, restored.attempts, restored.last_error, restored.ticket, restored.coalesce_key
FROM jsonb_populate_record(CAST(%(pgtask_row)s::VARCHAR AS jobs.enum_job), jsonb_build_object('attempts', %(pgtask_attempts)s::INTEGER, 'last_error', %(pgtask_last_error)s::VARCHAR, 'run_at', statement_timestamp() + %(pgtask_delay)s)) AS restored
