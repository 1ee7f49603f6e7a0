WITH chosen AS MATERIALIZED (SELECT picked.task_id AS task_id, picked.touched AS touched
FROM unnest(CAST(%(levels)s::INTEGER[] AS SMALLINT[]), CAST(%(types)s::TEXT[] AS TEXT[])) AS turns(level, kind) JOIN LATERAL (SELECT anon_1.task_id AS task_id, anon_1.touched AS touched
FROM (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at BETWEEN to_timestamp(CAST(%(since)s AS DOUBLE PRECISION)) AND statement_timestamp()
ORDER BY task.run_at
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_1
UNION ALL
SELECT anon_2.task_id AS task_id, anon_2.touched AS touched
FROM (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at IS NULL AND task.ticket >= CAST(%(pivot)s AS REAL)
ORDER BY task.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_2
UNION ALL
SELECT anon_3.task_id AS task_id, anon_3.touched AS touched
FROM (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at IS NULL AND task.ticket < CAST(%(pivot)s AS REAL)
ORDER BY task.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_3) AS picked ON true
LIMIT 1) DELETE
FROM task
WHERE task.task_id = ANY (array((SELECT chosen.task_id
FROM chosen)))
RETURNING task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, greatest('0001-01-02', least(task.created_at, '9999-01-02')) AS created_at, task.attempts, task.last_error, task.coalesce_key, task.lease_token, task.priority, CAST(task.* AS TEXT) AS pgtask_row, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched, set_config('application_name', left(concat('pgtask ', task.task_id, ' ', task.task_type), 63), true) AS pgtask_announced
