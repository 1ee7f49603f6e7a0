SELECT task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, CASE WHEN (task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(task.created_at, '9999-01-02')) END AS created_at, CASE WHEN (task.run_at IS NOT NULL) THEN greatest('0001-01-02', least(task.run_at, '9999-01-02')) END AS run_at, task.attempts, task.last_error, task.lease_token, task.priority, task.xmax = ANY (array((SELECT pg_catalog.pg_locks.transactionid
FROM pg_catalog.pg_locks
WHERE pg_catalog.pg_locks.locktype = 'transactionid' AND pg_catalog.pg_locks.granted))) AS running
FROM task
WHERE task.task_id = ANY (%(ids)s::BIGINT[])
ORDER BY task.task_id
