SELECT count(*) AS count, min("some".created_at) AS oldest_at, CAST(EXTRACT(epoch
FROM statement_timestamp() - min("some".created_at)) AS DOUBLE PRECISION) AS oldest_seconds
FROM (SELECT anon_1.created_at AS created_at
FROM (SELECT CASE WHEN (task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(task.created_at, '9999-01-02')) END AS created_at
FROM task
WHERE task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NULL
LIMIT %(param_1)s::INTEGER) AS anon_1
UNION ALL
SELECT anon_2.created_at AS created_at
FROM (SELECT CASE WHEN (task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(task.created_at, '9999-01-02')) END AS created_at
FROM task
WHERE task.task_type = CAST(%(kind)s::VARCHAR AS TEXT) AND task.run_at IS NOT NULL
LIMIT %(param_1)s::INTEGER) AS anon_2
LIMIT %(param_2)s::INTEGER) AS "some"
