SELECT 1
FROM task
WHERE task.task_id = %(task_id)s::BIGINT AND task.lease_token = %(token)s::UUID FOR KEY SHARE
