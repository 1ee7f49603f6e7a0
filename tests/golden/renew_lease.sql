UPDATE task
SET run_at=(statement_timestamp() + %(lease)s)
WHERE task.task_id = %(leased_id)s::BIGINT AND task.lease_token = %(token)s::UUID
RETURNING task.task_id
