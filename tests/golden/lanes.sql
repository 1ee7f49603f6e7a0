SELECT mod(task_worker.lane, 65536) AS lane, task_worker.worker_id, task_worker.host, task_worker.pid, task_worker.started_at, task_worker.seen_at, task_worker.is_direct, task_worker.backend_pid, task_worker.task_ids, task_worker.row_versions, coalesce(task_worker.begun_at, (SELECT pg_catalog.pg_stat_activity.xact_start
FROM pg_catalog.pg_stat_activity
WHERE task_worker.backend_pid = pg_catalog.pg_stat_activity.pid AND (starts_with(pg_catalog.pg_stat_activity.application_name, concat('pgtask ', task_worker.task_ids[1], ' ')) OR NOT starts_with(pg_catalog.pg_stat_activity.application_name, 'pgtask ') AND pg_catalog.pg_stat_activity.backend_xid IS NOT NULL))) AS begun_at, CAST(coalesce(task_worker.begun_at, (SELECT pg_catalog.pg_stat_activity.xact_start
FROM pg_catalog.pg_stat_activity
WHERE task_worker.backend_pid = pg_catalog.pg_stat_activity.pid AND (starts_with(pg_catalog.pg_stat_activity.application_name, concat('pgtask ', task_worker.task_ids[1], ' ')) OR NOT starts_with(pg_catalog.pg_stat_activity.application_name, 'pgtask ') AND pg_catalog.pg_stat_activity.backend_xid IS NOT NULL))) AS TEXT) AS begun, CASE WHEN task_worker.is_direct THEN EXISTS (SELECT pg_catalog.pg_locks.pid
FROM pg_catalog.pg_locks
WHERE pg_catalog.pg_locks.locktype = 'advisory' AND pg_catalog.pg_locks.database = (SELECT pg_catalog.pg_database.oid
FROM pg_catalog.pg_database
WHERE pg_catalog.pg_database.datname = current_database()) AND pg_catalog.pg_locks.classid = CAST(1885828204 AS OID) AND pg_catalog.pg_locks.objid = CAST(task_worker.worker_id AS OID) AND pg_catalog.pg_locks.objsubid = 2 AND pg_catalog.pg_locks.granted) ELSE task_worker.seen_at > statement_timestamp() - interval '60 seconds' END AS alive
FROM task_worker
ORDER BY task_worker.worker_id, lane
