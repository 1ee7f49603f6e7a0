WITH chosen AS MATERIALIZED (SELECT picked.task_id AS task_id, picked.touched AS touched
FROM unnest(CAST(%(levels)s::INTEGER[] AS SMALLINT[]), CAST(%(cursors)s::TEXT[] AS TEXT[])) AS turns(level, cursor) JOIN LATERAL (SELECT anon_1.task_id AS task_id, anon_1.touched AS touched
FROM (SELECT plain_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM plain_job
WHERE plain_job.priority = turns.level AND plain_job.run_at IS NULL AND plain_job.task_type = ANY (CAST(%(types)s::TEXT[] AS TEXT[])) AND plain_job.tenant > CAST(turns.cursor AS INTEGER)
ORDER BY plain_job.tenant, plain_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_1
UNION ALL
SELECT anon_2.task_id AS task_id, anon_2.touched AS touched
FROM (SELECT plain_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM plain_job
WHERE plain_job.priority = turns.level AND plain_job.run_at IS NULL AND plain_job.task_type = ANY (CAST(%(types)s::TEXT[] AS TEXT[])) AND turns.cursor IS NULL AND plain_job.tenant IS NOT NULL
ORDER BY plain_job.tenant, plain_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_2
UNION ALL
SELECT anon_3.task_id AS task_id, anon_3.touched AS touched
FROM (SELECT plain_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM plain_job
WHERE plain_job.priority = turns.level AND plain_job.run_at IS NULL AND plain_job.task_type = ANY (CAST(%(types)s::TEXT[] AS TEXT[])) AND plain_job.tenant IS NULL
ORDER BY plain_job.tenant, plain_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_3
UNION ALL
SELECT anon_4.task_id AS task_id, anon_4.touched AS touched
FROM (SELECT plain_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM plain_job
WHERE plain_job.priority = turns.level AND plain_job.run_at IS NULL AND plain_job.task_type = ANY (CAST(%(types)s::TEXT[] AS TEXT[])) AND plain_job.tenant <= CAST(turns.cursor AS INTEGER)
ORDER BY plain_job.tenant, plain_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_4
UNION ALL
SELECT anon_5.task_id AS task_id, anon_5.touched AS touched
FROM (SELECT due.task_id AS task_id, due.touched AS touched
FROM unnest(CAST(%(due_levels)s::INTEGER[] AS SMALLINT[]), CAST(%(due_types)s::TEXT[] AS TEXT[])) AS pairs(level, kind) JOIN LATERAL (SELECT plain_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM plain_job
WHERE plain_job.priority = pairs.level AND plain_job.task_type = CAST(pairs.kind AS TEXT) AND plain_job.run_at BETWEEN '-infinity' AND statement_timestamp()
ORDER BY plain_job.run_at
LIMIT 1 FOR UPDATE SKIP LOCKED) AS due ON true
WHERE pairs.level = turns.level
LIMIT 1) AS anon_5) AS picked ON true
LIMIT 1) DELETE
FROM plain_job
WHERE plain_job.task_id = ANY (array((SELECT chosen.task_id
FROM chosen)))
RETURNING plain_job.task_id, CAST(plain_job.task_type AS TEXT) AS task_type, CAST(plain_job.params AS TEXT) AS params, greatest('0001-01-02', least(plain_job.created_at, '9999-01-02')) AS created_at, plain_job.tenant, plain_job.note, plain_job.attempts, plain_job.last_error, plain_job.coalesce_key, plain_job.lease_token, plain_job.priority, CAST(plain_job.* AS TEXT) AS pgtask_row, CAST(CAST(plain_job.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched, CAST(plain_job.tenant AS TEXT) AS pgtask_key, plain_job.run_at IS NULL AS pgtask_is_ready, array_position(array((SELECT chosen.task_id
FROM chosen)), plain_job.task_id) AS pgtask_place, set_config('application_name', left(concat('pgtask ', plain_job.task_id, ' ', plain_job.task_type), 63), true) AS pgtask_announced
