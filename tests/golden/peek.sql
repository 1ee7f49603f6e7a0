SELECT (EXISTS (SELECT 1
FROM unnest(CAST(%(types)s::TEXT[] AS TEXT[])) AS kinds(kind) JOIN LATERAL (SELECT task.run_at AS run_at
FROM task
WHERE task.task_type = kinds.kind AND task.run_at IS NULL
ORDER BY task.ticket
LIMIT %(param_1)s::INTEGER) AS ready ON true)) OR (EXISTS (SELECT 1
FROM unnest(CAST(%(types)s::TEXT[] AS TEXT[])) AS kinds(kind) JOIN LATERAL (SELECT task.run_at AS run_at
FROM task
WHERE task.task_type = kinds.kind AND task.run_at BETWEEN '-infinity' AND statement_timestamp()
ORDER BY task.run_at
LIMIT %(param_1)s::INTEGER) AS due ON true)) AS ready, CAST(EXTRACT(epoch
FROM (SELECT min(later.run_at) AS min_1
FROM unnest(CAST(%(types)s::TEXT[] AS TEXT[])) AS kinds(kind) JOIN LATERAL (SELECT task.run_at AS run_at
FROM task
WHERE task.task_type = kinds.kind AND task.run_at > statement_timestamp() AND task.run_at < 'infinity'
ORDER BY task.run_at
LIMIT %(param_1)s::INTEGER) AS later ON true) - statement_timestamp()) AS DOUBLE PRECISION) AS seconds
