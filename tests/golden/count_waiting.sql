SELECT count(*) AS count_1
FROM (SELECT anon_1.task_type AS task_type
FROM (SELECT task.task_type AS task_type
FROM task
WHERE task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NULL
LIMIT %(param_1)s::INTEGER) AS anon_1
UNION ALL
SELECT anon_2.task_type AS task_type
FROM (SELECT task.task_type AS task_type
FROM task
WHERE task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NOT NULL
LIMIT %(param_2)s::INTEGER) AS anon_2
LIMIT %(param_3)s::INTEGER) AS "some"
