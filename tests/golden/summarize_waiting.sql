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
SELECT count(*) AS count, min("some".created_at) AS oldest_at, CAST(EXTRACT(epoch
FROM statement_timestamp() - min("some".created_at)) AS DOUBLE PRECISION) AS oldest_seconds
FROM (SELECT anon_1.created_at AS created_at
FROM (SELECT ready.created_at AS created_at
FROM ready_levels JOIN LATERAL (SELECT CASE WHEN (task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(task.created_at, '9999-01-02')) END AS created_at
FROM task
WHERE task.priority = ready_levels.level AND task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NULL
LIMIT %(param_1)s::INTEGER) AS ready ON true
LIMIT %(param_2)s::INTEGER) AS anon_1
UNION ALL
SELECT anon_2.created_at AS created_at
FROM (SELECT planned.created_at AS created_at
FROM planned_levels JOIN LATERAL (SELECT CASE WHEN (task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(task.created_at, '9999-01-02')) END AS created_at
FROM task
WHERE task.priority = planned_levels.level AND task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NOT NULL
LIMIT %(param_3)s::INTEGER) AS planned ON true
LIMIT %(param_4)s::INTEGER) AS anon_2
LIMIT %(param_5)s::INTEGER) AS "some"
