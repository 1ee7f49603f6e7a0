SELECT coalesce(waiting.kind, buried.kind) AS task_type, coalesce(waiting.ready, %(coalesce_1)s::INTEGER) AS ready, coalesce(waiting.running, %(coalesce_2)s::INTEGER) AS running, coalesce(waiting.planned, %(coalesce_3)s::INTEGER) AS planned, coalesce(waiting.leased, %(coalesce_4)s::INTEGER) AS leased, coalesce(waiting.retrying, %(coalesce_5)s::INTEGER) AS retrying, coalesce(buried.dead, %(coalesce_6)s::INTEGER) AS dead, waiting.oldest_seconds
FROM (SELECT CAST(task.task_type AS TEXT) AS kind, count(*) FILTER (WHERE (task.run_at IS NULL OR task.run_at <= statement_timestamp()) AND NOT (task.xmax = ANY (array((SELECT pg_catalog.pg_locks.transactionid
FROM pg_catalog.pg_locks
WHERE pg_catalog.pg_locks.locktype = 'transactionid' AND pg_catalog.pg_locks.granted))))) AS ready, count(*) FILTER (WHERE (task.run_at IS NULL OR task.run_at <= statement_timestamp()) AND task.xmax = ANY (array((SELECT pg_catalog.pg_locks.transactionid
FROM pg_catalog.pg_locks
WHERE pg_catalog.pg_locks.locktype = 'transactionid' AND pg_catalog.pg_locks.granted)))) AS running, count(*) FILTER (WHERE task.run_at > statement_timestamp() AND task.lease_token IS NULL) AS planned, count(*) FILTER (WHERE task.run_at > statement_timestamp() AND task.lease_token IS NOT NULL) AS leased, count(*) FILTER (WHERE task.attempts > %(attempts_1)s::INTEGER AND (task.run_at IS NULL OR task.run_at <= statement_timestamp() OR task.lease_token IS NULL)) AS retrying, CAST(EXTRACT(epoch
FROM statement_timestamp() - min(CASE WHEN ((task.run_at IS NULL OR task.run_at <= statement_timestamp()) AND NOT (task.xmax = ANY (array((SELECT pg_catalog.pg_locks.transactionid
FROM pg_catalog.pg_locks
WHERE pg_catalog.pg_locks.locktype = 'transactionid' AND pg_catalog.pg_locks.granted)))) AND isfinite(coalesce(task.run_at, task.created_at))) THEN coalesce(task.run_at, task.created_at) END)) AS DOUBLE PRECISION) AS oldest_seconds
FROM task GROUP BY task.task_type) AS waiting FULL OUTER JOIN (SELECT CAST(dead_task.task_type AS TEXT) AS kind, count(*) AS dead
FROM dead_task GROUP BY dead_task.task_type) AS buried ON waiting.kind = buried.kind
ORDER BY task_type
