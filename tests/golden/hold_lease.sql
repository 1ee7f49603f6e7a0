SELECT 1
FROM task
WHERE task.task_id = %(leased_id)s::BIGINT AND task.lease_token = %(token)s::UUID FOR KEY SHARE
