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
SELECT DISTINCT kinds.kind
FROM (SELECT ready_pairs.level AS level, CAST(ready_pairs.kind AS TEXT) AS kind
FROM ready_pairs
UNION ALL
SELECT planned_pairs.level AS level, CAST(planned_pairs.kind AS TEXT) AS kind
FROM planned_pairs) AS kinds
ORDER BY kinds.kind
