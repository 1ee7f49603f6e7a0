DELETE
FROM task
WHERE task.task_id = %(leased_id)s::BIGINT AND task.lease_token = %(token)s::UUID
RETURNING task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, greatest('0001-01-02', least(task.created_at, '9999-01-02')) AS created_at, task.attempts, task.last_error, task.coalesce_key, task.lease_token, task.priority, CAST(task.* AS TEXT) AS pgtask_row, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun
