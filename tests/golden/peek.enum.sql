SELECT (EXISTS (SELECT 1
FROM unnest(CAST(%(types)s::TEXT[] AS jobs.kind[])) AS kinds(kind) JOIN LATERAL (SELECT jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.task_type = kinds.kind AND jobs.enum_job.run_at IS NULL
ORDER BY jobs.enum_job.ticket
LIMIT %(param_1)s::INTEGER) AS ready ON true)) OR (EXISTS (SELECT 1
FROM unnest(CAST(%(types)s::TEXT[] AS jobs.kind[])) AS kinds(kind) JOIN LATERAL (SELECT jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.task_type = kinds.kind AND jobs.enum_job.run_at BETWEEN '-infinity' AND statement_timestamp()
ORDER BY jobs.enum_job.run_at
LIMIT %(param_1)s::INTEGER) AS due ON true)) AS ready, CAST(EXTRACT(epoch
FROM (SELECT min(later.run_at) AS min_1
FROM unnest(CAST(%(types)s::TEXT[] AS jobs.kind[])) AS kinds(kind) JOIN LATERAL (SELECT jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.task_type = kinds.kind AND jobs.enum_job.run_at > statement_timestamp() AND jobs.enum_job.run_at < 'infinity'
ORDER BY jobs.enum_job.run_at
LIMIT %(param_1)s::INTEGER) AS later ON true) - statement_timestamp()) AS DOUBLE PRECISION) AS seconds
