WITH chosen AS MATERIALIZED (SELECT picked.task_id AS task_id, picked.touched AS touched, picked.attempts AS attempts, picked.version AS version
FROM unnest(CAST(%(levels)s::INTEGER[] AS SMALLINT[]), CAST(%(types)s::TEXT[] AS jobs.kind[])) AS turns(level, kind) JOIN LATERAL (SELECT anon_1.task_id AS task_id, anon_1.touched AS touched, anon_1.attempts AS attempts, anon_1.version AS version
FROM (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched, jobs.enum_job.attempts AS attempts, CASE WHEN (CAST(jobs.enum_job.task_type AS TEXT) = ANY (%(leased)s::TEXT[])) THEN -CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) ELSE CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) END AS version
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at BETWEEN to_timestamp(CAST(%(since)s AS DOUBLE PRECISION)) AND statement_timestamp()
ORDER BY jobs.enum_job.run_at
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_1
UNION ALL
SELECT anon_2.task_id AS task_id, anon_2.touched AS touched, anon_2.attempts AS attempts, anon_2.version AS version
FROM (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched, jobs.enum_job.attempts AS attempts, CASE WHEN (CAST(jobs.enum_job.task_type AS TEXT) = ANY (%(leased)s::TEXT[])) THEN -CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) ELSE CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) END AS version
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at IS NULL AND jobs.enum_job.ticket >= CAST(%(pivot)s AS REAL)
ORDER BY jobs.enum_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_2
UNION ALL
SELECT anon_3.task_id AS task_id, anon_3.touched AS touched, anon_3.attempts AS attempts, anon_3.version AS version
FROM (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched, jobs.enum_job.attempts AS attempts, CASE WHEN (CAST(jobs.enum_job.task_type AS TEXT) = ANY (%(leased)s::TEXT[])) THEN -CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) ELSE CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) END AS version
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at IS NULL AND jobs.enum_job.ticket < CAST(%(pivot)s AS REAL)
ORDER BY jobs.enum_job.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_3) AS picked ON true
LIMIT 1) UPDATE jobs.enum_job_worker
SET lane=%(number)s::INTEGER, seen_at=statement_timestamp(), backend_pid=pg_backend_pid(), begun_at=NULL, task_ids=array((SELECT chosen.task_id
FROM chosen
WHERE NOT chosen.touched AND chosen.attempts = 0)), row_versions=array((SELECT chosen.version
FROM chosen
WHERE NOT chosen.touched AND chosen.attempts = 0))
WHERE jobs.enum_job_worker.worker_id = %(worker_id)s::INTEGER AND mod(jobs.enum_job_worker.lane, 65536) = %(which)s::INTEGER AND enum_job_worker.ctid = CAST(%(place)s AS tid)
RETURNING CAST(enum_job_worker.ctid AS TEXT) AS place, EXISTS (SELECT 1
FROM chosen) AS found, cardinality(jobs.enum_job_worker.task_ids) AS named, set_config('synchronous_commit', 'off', true) AS lazily, set_config('pgtask.noted', CAST(ARRAY[jobs.enum_job_worker.task_ids[1], abs(jobs.enum_job_worker.row_versions[1]), CAST(CAST(pg_current_xact_id()::xid AS TEXT) AS BIGINT)] AS TEXT), false) AS handed_on
