SELECT task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS version, task.lease_token IS NOT NULL AS leased
FROM task
WHERE task.task_id = ANY (%(ids)s::BIGINT[])
