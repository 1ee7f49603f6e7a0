WITH chosen AS MATERIALIZED (SELECT picked.task_id AS task_id, picked.touched AS touched, picked.attempts AS attempts, picked.version AS version
FROM unnest(CAST(%(levels)s::INTEGER[] AS SMALLINT[]), CAST(%(types)s::TEXT[] AS TEXT[])) AS turns(level, kind) JOIN LATERAL (SELECT anon_1.task_id AS task_id, anon_1.touched AS touched, anon_1.attempts AS attempts, anon_1.version AS version
FROM (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched, task.attempts AS attempts, CASE WHEN (CAST(task.task_type AS TEXT) = ANY (%(leased)s::TEXT[])) THEN -CAST(CAST(task.xmin AS TEXT) AS BIGINT) ELSE CAST(CAST(task.xmin AS TEXT) AS BIGINT) END AS version
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at IS NULL AND task.ticket >= CAST(%(pivot)s AS REAL)
ORDER BY task.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_1
UNION ALL
SELECT anon_2.task_id AS task_id, anon_2.touched AS touched, anon_2.attempts AS attempts, anon_2.version AS version
FROM (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched, task.attempts AS attempts, CASE WHEN (CAST(task.task_type AS TEXT) = ANY (%(leased)s::TEXT[])) THEN -CAST(CAST(task.xmin AS TEXT) AS BIGINT) ELSE CAST(CAST(task.xmin AS TEXT) AS BIGINT) END AS version
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at IS NULL AND task.ticket < CAST(%(pivot)s AS REAL)
ORDER BY task.ticket
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_2
UNION ALL
SELECT anon_3.task_id AS task_id, anon_3.touched AS touched, anon_3.attempts AS attempts, anon_3.version AS version
FROM (SELECT task.task_id AS task_id, xmax <> '0'::xid AS touched, task.attempts AS attempts, CASE WHEN (CAST(task.task_type AS TEXT) = ANY (%(leased)s::TEXT[])) THEN -CAST(CAST(task.xmin AS TEXT) AS BIGINT) ELSE CAST(CAST(task.xmin AS TEXT) AS BIGINT) END AS version
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at BETWEEN '-infinity' AND statement_timestamp()
ORDER BY task.run_at
LIMIT 1 FOR UPDATE SKIP LOCKED) AS anon_3) AS picked ON true
LIMIT 1) UPDATE task_worker
SET lane=%(number)s::INTEGER, seen_at=statement_timestamp(), backend_pid=pg_backend_pid(), begun_at=NULL, task_ids=array((SELECT chosen.task_id
FROM chosen
WHERE NOT chosen.touched AND chosen.attempts = 0)), row_versions=array((SELECT chosen.version
FROM chosen
WHERE NOT chosen.touched AND chosen.attempts = 0))
WHERE task_worker.worker_id = %(worker_id)s::INTEGER AND mod(task_worker.lane, 65536) = %(which)s::INTEGER AND task_worker.ctid = CAST(%(place)s AS tid)
RETURNING CAST(task_worker.ctid AS TEXT) AS place, EXISTS (SELECT 1
FROM chosen) AS found, cardinality(task_worker.task_ids) AS named, set_config('synchronous_commit', 'off', true) AS lazily, set_config('pgtask.noted', CAST(ARRAY[task_worker.task_ids[1], abs(task_worker.row_versions[1]), CAST(CAST(pg_current_xact_id()::xid AS TEXT) AS BIGINT)] AS TEXT), false) AS handed_on
