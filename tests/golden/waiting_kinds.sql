WITH RECURSIVE ready_kinds(kind) AS (SELECT (SELECT task.task_type
FROM task
WHERE task.run_at IS NULL
ORDER BY task.task_type
LIMIT %(param_1)s::INTEGER) AS kind
UNION ALL
SELECT (SELECT task.task_type
FROM task
WHERE task.run_at IS NULL AND task.task_type > ready_kinds.kind
ORDER BY task.task_type
LIMIT %(param_1)s::INTEGER) AS anon_1
FROM ready_kinds
WHERE ready_kinds.kind IS NOT NULL), planned_kinds(kind) AS (SELECT (SELECT task.task_type
FROM task
WHERE task.run_at IS NOT NULL
ORDER BY task.task_type
LIMIT %(param_2)s::INTEGER) AS kind
UNION ALL
SELECT (SELECT task.task_type
FROM task
WHERE task.run_at IS NOT NULL AND task.task_type > planned_kinds.kind
ORDER BY task.task_type
LIMIT %(param_2)s::INTEGER) AS anon_2
FROM planned_kinds
WHERE planned_kinds.kind IS NOT NULL)
SELECT DISTINCT kinds.kind
FROM (SELECT CAST(ready_kinds.kind AS TEXT) AS kind
FROM ready_kinds
WHERE ready_kinds.kind IS NOT NULL
UNION ALL
SELECT CAST(planned_kinds.kind AS TEXT) AS kind
FROM planned_kinds
WHERE planned_kinds.kind IS NOT NULL) AS kinds
ORDER BY kinds.kind
