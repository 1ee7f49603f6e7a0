WITH RECURSIVE ready_pairs(level, kind) AS (SELECT first.level AS level, first.kind AS kind
FROM (SELECT jobs.enum_job.priority AS level, jobs.enum_job.task_type AS kind
FROM jobs.enum_job
WHERE jobs.enum_job.run_at IS NULL
ORDER BY jobs.enum_job.priority, jobs.enum_job.task_type
LIMIT 1) AS first
UNION ALL
SELECT larger.level AS level, larger.kind AS kind
FROM ready_pairs JOIN LATERAL (SELECT jobs.enum_job.priority AS level, jobs.enum_job.task_type AS kind
FROM jobs.enum_job
WHERE jobs.enum_job.run_at IS NULL AND (jobs.enum_job.priority, jobs.enum_job.task_type) > (ready_pairs.level, ready_pairs.kind)
ORDER BY jobs.enum_job.priority, jobs.enum_job.task_type
LIMIT 1) AS larger ON true), firsts(level, kind, run_at) AS (SELECT first.level AS level, first.kind AS kind, first.run_at AS run_at
FROM (SELECT jobs.enum_job.priority AS level, jobs.enum_job.task_type AS kind, jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.run_at IS NOT NULL
ORDER BY jobs.enum_job.priority, jobs.enum_job.task_type, jobs.enum_job.run_at
LIMIT 1) AS first
WHERE (SELECT CAST(%(thorough)s AS BOOLEAN) AS anon_6)
UNION ALL
SELECT larger.level AS level, larger.kind AS kind, larger.run_at AS run_at
FROM firsts JOIN LATERAL (SELECT jobs.enum_job.priority AS level, jobs.enum_job.task_type AS kind, jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.run_at IS NOT NULL AND (jobs.enum_job.priority, jobs.enum_job.task_type) > (firsts.level, firsts.kind)
ORDER BY jobs.enum_job.priority, jobs.enum_job.task_type, jobs.enum_job.run_at
LIMIT 1) AS larger ON true)
SELECT ready_pairs.level, CAST(ready_pairs.kind AS TEXT) AS kind, CAST(NULL AS DOUBLE PRECISION) AS due, CAST(NULL AS BIGINT) AS dead
FROM ready_pairs
WHERE ready_pairs.kind = ANY (CAST(%(types)s::TEXT[] AS jobs.kind[]))
UNION ALL
SELECT given.level, CAST(given.kind AS TEXT) AS kind, CAST(EXTRACT(epoch
FROM due.run_at) AS DOUBLE PRECISION) AS anon_1, CAST(NULL AS BIGINT) AS anon_2
FROM unnest((SELECT CAST(%(levels)s::INTEGER[] AS SMALLINT[]) AS anon_3), (SELECT CAST(%(kinds)s::TEXT[] AS jobs.kind[]) AS anon_4)) AS given(level, kind) JOIN LATERAL (SELECT jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.priority = given.level AND jobs.enum_job.task_type = given.kind AND jobs.enum_job.run_at BETWEEN (SELECT to_timestamp(CAST(%(since)s AS DOUBLE PRECISION)) AS to_timestamp_1) AND statement_timestamp()
ORDER BY jobs.enum_job.run_at
LIMIT 1) AS due ON true
UNION ALL
SELECT firsts.level, CAST(firsts.kind AS TEXT) AS kind, CAST(EXTRACT(epoch
FROM firsts.run_at) AS DOUBLE PRECISION) AS anon_5, CAST(NULL AS BIGINT) AS anon_2
FROM firsts
WHERE firsts.kind = ANY (CAST(%(types)s::TEXT[] AS jobs.kind[])) AND firsts.run_at <= statement_timestamp()
UNION ALL
SELECT CAST(NULL AS INTEGER) AS anon_2, CAST(NULL AS TEXT) AS anon__1, CAST(EXTRACT(epoch
FROM statement_timestamp()) AS DOUBLE PRECISION) AS anon_7, CAST(coalesce((SELECT sum(pg_stat_get_dead_tuples(parts.relid)) AS sum_1
FROM pg_partition_tree(to_regclass(concat(quote_ident(%(quote_ident_1)s), %(concat_1)s::VARCHAR, quote_ident(%(quote_ident_2)s)))) AS parts), pg_stat_get_dead_tuples(to_regclass(concat(quote_ident(%(quote_ident_3)s), %(concat_2)s::VARCHAR, quote_ident(%(quote_ident_4)s))))) AS BIGINT) AS coalesce_1
