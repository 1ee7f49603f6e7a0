WITH named AS MATERIALIZED (SELECT task_worker.task_ids[1] AS task_id, task_worker.row_versions[1] AS version, task_worker.xmin AS noted_by
FROM task_worker
WHERE task_worker.worker_id = %(worker_id)s::INTEGER AND task_worker.lane = %(number)s::INTEGER), chosen AS MATERIALIZED (SELECT task.task_id AS task_id, false AS touched
FROM task
WHERE task.task_id = (SELECT named.task_id
FROM named) AND CAST(CAST(task.xmin AS TEXT) AS BIGINT) = abs((SELECT named.version
FROM named)) AND task.xmax = (SELECT named.noted_by
FROM named) FOR UPDATE OF task SKIP LOCKED) DELETE
FROM task
WHERE task.task_id = (SELECT chosen.task_id
FROM chosen)
RETURNING task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, greatest('0001-01-02', least(task.created_at, '9999-01-02')) AS created_at, task.attempts, task.last_error, task.coalesce_key, task.lease_token, task.priority, CAST(task.* AS TEXT) AS pgtask_row, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched, set_config('application_name', left(concat('pgtask ', task.task_id, ' ', task.task_type), 63), true) AS pgtask_announced
