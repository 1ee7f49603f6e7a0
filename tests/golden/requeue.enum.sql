WITH gone AS (DELETE
FROM dead_task
WHERE dead_task.task_id = %(task_id_1)s::BIGINT
RETURNING task_id, task_type, params, created_at, last_error, coalesce_key, priority) INSERT INTO jobs.enum_job (task_id, task_type, params, created_at, last_error, coalesce_key, priority) OVERRIDING SYSTEM VALUE
SELECT gone.task_id, CAST(CAST(gone.task_type AS TEXT) AS jobs.kind) AS task_type, gone.params, gone.created_at, gone.last_error, gone.coalesce_key, gone.priority
FROM gone ON CONFLICT DO NOTHING
RETURNING task_id
