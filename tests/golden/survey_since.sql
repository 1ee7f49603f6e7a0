WITH RECURSIVE ready_pairs(level, kind) AS (SELECT first.level AS level, first.kind AS kind
FROM (SELECT task.priority AS level, task.task_type AS kind
FROM task
WHERE task.run_at IS NULL
ORDER BY task.priority, task.task_type
LIMIT 1) AS first
UNION ALL
SELECT larger.level AS level, larger.kind AS kind
FROM ready_pairs JOIN LATERAL (SELECT task.priority AS level, task.task_type AS kind
FROM task
WHERE task.run_at IS NULL AND (task.priority, task.task_type) > (ready_pairs.level, ready_pairs.kind)
ORDER BY task.priority, task.task_type
LIMIT 1) AS larger ON true), planned_pairs(level, kind) AS (SELECT first.level AS level, first.kind AS kind
FROM (SELECT task.priority AS level, task.task_type AS kind
FROM task
WHERE task.run_at IS NOT NULL
ORDER BY task.priority, task.task_type
LIMIT 1) AS first
WHERE (SELECT CAST(%(thorough)s AS BOOLEAN) AS anon_4)
UNION ALL
SELECT larger.level AS level, larger.kind AS kind
FROM planned_pairs JOIN LATERAL (SELECT task.priority AS level, task.task_type AS kind
FROM task
WHERE task.run_at IS NOT NULL AND (task.priority, task.task_type) > (planned_pairs.level, planned_pairs.kind)
ORDER BY task.priority, task.task_type
LIMIT 1) AS larger ON true)
SELECT ready_pairs.level, CAST(ready_pairs.kind AS TEXT) AS kind, CAST(NULL AS DOUBLE PRECISION) AS due
FROM ready_pairs
WHERE ready_pairs.kind = ANY (CAST(%(types)s::TEXT[] AS TEXT[]))
UNION ALL
SELECT pairs.level, CAST(pairs.kind AS TEXT) AS kind, CAST(EXTRACT(epoch
FROM first_due.run_at) AS DOUBLE PRECISION) AS anon_1
FROM (SELECT given.level AS level, given.kind AS kind
FROM unnest((SELECT CAST(%(levels)s::INTEGER[] AS SMALLINT[]) AS anon_2), (SELECT CAST(%(kinds)s::TEXT[] AS TEXT[]) AS anon_3)) AS given(level, kind) UNION
SELECT planned_pairs.level AS level, planned_pairs.kind AS kind
FROM planned_pairs
WHERE planned_pairs.kind = ANY (CAST(%(types)s::TEXT[] AS TEXT[]))) AS pairs JOIN LATERAL (SELECT task.run_at AS run_at
FROM task
WHERE task.priority = pairs.level AND task.task_type = pairs.kind AND task.run_at BETWEEN (SELECT to_timestamp(CAST(%(since)s AS DOUBLE PRECISION)) AS to_timestamp_1) AND statement_timestamp()
ORDER BY task.run_at
LIMIT 1) AS first_due ON true
UNION ALL
SELECT CAST(NULL AS INTEGER) AS anon_5, CAST(NULL AS TEXT) AS anon__1, CAST(EXTRACT(epoch
FROM statement_timestamp()) AS DOUBLE PRECISION) AS anon_6
