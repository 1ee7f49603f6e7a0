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
UNION ALL
SELECT larger.level AS level, larger.kind AS kind
FROM planned_pairs JOIN LATERAL (SELECT task.priority AS level, task.task_type AS kind
FROM task
WHERE task.run_at IS NOT NULL AND (task.priority, task.task_type) > (planned_pairs.level, planned_pairs.kind)
ORDER BY task.priority, task.task_type
LIMIT 1) AS larger ON true)
SELECT (EXISTS (SELECT 1
FROM ready_pairs
WHERE ready_pairs.kind = ANY (CAST(%(types)s::TEXT[] AS TEXT[])))) OR (EXISTS (SELECT 1
FROM planned_pairs JOIN LATERAL (SELECT task.run_at AS run_at
FROM task
WHERE task.priority = planned_pairs.level AND task.task_type = planned_pairs.kind AND task.run_at BETWEEN '-infinity' AND statement_timestamp()
ORDER BY task.run_at
LIMIT 1) AS due ON true
WHERE planned_pairs.kind = ANY (CAST(%(types)s::TEXT[] AS TEXT[])))) AS ready, CAST(EXTRACT(epoch
FROM (SELECT min(later.run_at) AS min_1
FROM planned_pairs JOIN LATERAL (SELECT task.run_at AS run_at
FROM task
WHERE task.priority = planned_pairs.level AND task.task_type = planned_pairs.kind AND task.run_at > statement_timestamp() AND task.run_at < 'infinity'
ORDER BY task.run_at
LIMIT 1) AS later ON true
WHERE planned_pairs.kind = ANY (CAST(%(types)s::TEXT[] AS TEXT[]))) - statement_timestamp()) AS DOUBLE PRECISION) AS seconds
