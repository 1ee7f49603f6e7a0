WITH chosen AS MATERIALIZED (SELECT picked.task_id AS task_id, picked.touched AS touched
FROM unnest(CAST(%(levels)s::INTEGER[] AS SMALLINT[]), CAST(%(types)s::TEXT[] AS jobs.kind[])) AS turns(level, kind) JOIN LATERAL (SELECT anon_1.task_id AS task_id, anon_1.touched AS touched
FROM (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at IS NULL AND jobs.enum_job.ticket >= CAST(%(pivot)s AS REAL)
ORDER BY jobs.enum_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_1
UNION ALL
SELECT anon_2.task_id AS task_id, anon_2.touched AS touched
FROM (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at IS NULL AND jobs.enum_job.ticket < CAST(%(pivot)s AS REAL)
ORDER BY jobs.enum_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_2
UNION ALL
SELECT anon_3.task_id AS task_id, anon_3.touched AS touched
FROM (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at BETWEEN '-infinity' AND statement_timestamp()
ORDER BY jobs.enum_job.run_at
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_3) AS picked ON true
LIMIT 1) DELETE
FROM jobs.enum_job
WHERE jobs.enum_job.task_id = ANY (array((SELECT chosen.task_id
FROM chosen)))
RETURNING jobs.enum_job.task_id, CAST(jobs.enum_job.params AS TEXT) AS params, greatest('0001-01-02', least(jobs.enum_job.created_at, '9999-01-02')) AS created_at, CAST(jobs.enum_job.task_type AS TEXT) AS task_type, jobs.enum_job.attempts, jobs.enum_job.last_error, jobs.enum_job.coalesce_key, jobs.enum_job.lease_token, jobs.enum_job.priority, CAST(enum_job.* AS TEXT) AS pgtask_row, CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched, set_config('application_name', left(concat('pgtask ', jobs.enum_job.task_id, ' ', jobs.enum_job.task_type), 63), true) AS pgtask_announced
