DELETE
FROM task
WHERE task.task_id = %(task_id)s::BIGINT AND (SELECT pg_terminate_backend(holder.pid) AS pg_terminate_backend_1
FROM pg_catalog.pg_stat_activity AS holder
WHERE holder.pid = %(pid)s::INTEGER AND (CAST(%(begun)s::VARCHAR AS TEXT) IS NULL OR holder.xact_start = CAST(CAST(%(begun)s::VARCHAR AS TEXT) AS TIMESTAMP WITH TIME ZONE)) AND task.task_id = %(task_id)s::BIGINT) IS NOT NULL
RETURNING task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, greatest('0001-01-02', least(task.created_at, '9999-01-02')) AS created_at, task.attempts, task.last_error, task.coalesce_key, task.lease_token, task.priority, CAST(task.* AS TEXT) AS pgtask_row, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun
