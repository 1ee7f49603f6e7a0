WITH chosen AS MATERIALIZED (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched
FROM task
WHERE task.task_id = %(task_id)s::BIGINT FOR UPDATE SKIP LOCKED) DELETE
FROM task
WHERE task.task_id = ANY (array((SELECT chosen.task_id
FROM chosen)))
RETURNING task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, greatest('0001-01-02', least(task.created_at, '9999-01-02')) AS created_at, task.attempts, task.last_error, task.coalesce_key, task.lease_token, task.priority, CAST(task.* AS TEXT) AS pgtask_row, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched, set_config('application_name', left(concat('pgtask ', task.task_id, ' ', task.task_type), 63), true) AS pgtask_announced
