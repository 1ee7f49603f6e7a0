DELETE
FROM task
WHERE task.task_id = %(leased_id)s::BIGINT AND task.lease_token = %(token)s::UUID
RETURNING task.task_id
