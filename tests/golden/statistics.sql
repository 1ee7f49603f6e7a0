SELECT coalesce(waiting.kind, buried.kind) AS task_type, coalesce(waiting.ready, %(coalesce_1)s::INTEGER) AS ready, coalesce(waiting.planned, %(coalesce_2)s::INTEGER) AS planned, coalesce(waiting.retrying, %(coalesce_3)s::INTEGER) AS retrying, coalesce(buried.dead, %(coalesce_4)s::INTEGER) AS dead, waiting.oldest_seconds
FROM (SELECT CAST(task.task_type AS TEXT) AS kind, count(*) FILTER (WHERE task.run_at IS NULL OR task.run_at <= statement_timestamp()) AS ready, count(*) FILTER (WHERE task.run_at > statement_timestamp()) AS planned, count(*) FILTER (WHERE task.attempts > %(attempts_1)s::INTEGER) AS retrying, CAST(EXTRACT(epoch
FROM statement_timestamp() - min(CASE WHEN ((task.run_at IS NULL OR task.run_at <= statement_timestamp()) AND isfinite(coalesce(task.run_at, task.created_at))) THEN coalesce(task.run_at, task.created_at) END)) AS DOUBLE PRECISION) AS oldest_seconds
FROM task GROUP BY task.task_type) AS waiting FULL OUTER JOIN (SELECT CAST(dead_task.task_type AS TEXT) AS kind, count(*) AS dead
FROM dead_task GROUP BY dead_task.task_type) AS buried ON waiting.kind = buried.kind
ORDER BY task_type
