SELECT count(*) AS count, min("some".created_at) AS oldest_at, CAST(EXTRACT(epoch
FROM statement_timestamp() - min("some".created_at)) AS DOUBLE PRECISION) AS oldest_seconds
FROM (SELECT task.created_at AS created_at
FROM task
WHERE task.task_type = CAST(%(kind)s::VARCHAR AS TEXT)
LIMIT %(param_1)s::INTEGER) AS "some"
