WITH gone AS (DELETE
FROM dead_task
WHERE dead_task.task_id = %(task_id_1)s::BIGINT
RETURNING dead_task.task_id, dead_task.task_type, dead_task.params, dead_task.created_at, dead_task.last_error, dead_task.coalesce_key) INSERT INTO task (task_id, task_type, params, created_at, last_error, coalesce_key) OVERRIDING SYSTEM VALUE
SELECT gone.task_id, gone.task_type, gone.params, gone.created_at, gone.last_error, gone.coalesce_key
FROM gone ON CONFLICT DO NOTHING
RETURNING task.task_id
