WITH RECURSIVE ready_levels(level) AS (SELECT first.level AS level
FROM (SELECT task.priority AS level
FROM task
WHERE task.run_at IS NULL
ORDER BY task.priority
LIMIT 1) AS first
UNION ALL
SELECT larger.level AS level
FROM ready_levels JOIN LATERAL (SELECT task.priority AS level
FROM task
WHERE task.run_at IS NULL AND (task.priority) > (ready_levels.level)
ORDER BY task.priority
LIMIT 1) AS larger ON true), planned_levels(level) AS (SELECT first.level AS level
FROM (SELECT task.priority AS level
FROM task
WHERE task.run_at IS NOT NULL
ORDER BY task.priority
LIMIT 1) AS first
UNION ALL
SELECT larger.level AS level
FROM planned_levels JOIN LATERAL (SELECT task.priority AS level
FROM task
WHERE task.run_at IS NOT NULL AND (task.priority) > (planned_levels.level)
ORDER BY task.priority
LIMIT 1) AS larger ON true)
SELECT count(*) AS count_1
FROM (SELECT anon_1.task_type AS task_type
FROM (SELECT ready.task_type AS task_type
FROM ready_levels JOIN LATERAL (SELECT task.task_type AS task_type
FROM task
WHERE task.priority = ready_levels.level AND task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NULL
LIMIT %(param_1)s::INTEGER) AS ready ON true
LIMIT %(param_2)s::INTEGER) AS anon_1
UNION ALL
SELECT anon_2.task_type AS task_type
FROM (SELECT planned.task_type AS task_type
FROM planned_levels JOIN LATERAL (SELECT task.task_type AS task_type
FROM task
WHERE task.priority = planned_levels.level AND task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NOT NULL
LIMIT %(param_3)s::INTEGER) AS planned ON true
LIMIT %(param_4)s::INTEGER) AS anon_2
LIMIT %(param_5)s::INTEGER) AS "some"
