WITH named AS MATERIALIZED (SELECT CAST(nullif(current_setting('pgtask.noted', true), '') AS BIGINT[]) AS numbers) DELETE
FROM task
WHERE task.task_id = (SELECT task.task_id
FROM task
WHERE task.task_id = (SELECT named.numbers[1] AS anon_1
FROM named) AND CAST(CAST(task.xmin AS TEXT) AS BIGINT) = (SELECT named.numbers[2] AS anon_2
FROM named) AND CAST(CAST(task.xmax AS TEXT) AS BIGINT) = (SELECT named.numbers[3] AS anon_3
FROM named) FOR UPDATE OF task SKIP LOCKED)
RETURNING task.task_id, CAST(task.task_type AS TEXT) AS task_type, CAST(task.params AS TEXT) AS params, greatest('0001-01-02', least(task.created_at, '9999-01-02')) AS created_at, task.attempts, task.last_error, task.coalesce_key, task.lease_token, task.priority, CAST(task.* AS TEXT) AS pgtask_row, CAST(CAST(task.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, false AS pgtask_touched, set_config('application_name', left(concat('pgtask ', task.task_id, ' ', task.task_type), 63), true) AS pgtask_announced
