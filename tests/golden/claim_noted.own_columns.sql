WITH named AS MATERIALIZED (SELECT CAST(nullif(current_setting('pgtask.noted', true), '') AS BIGINT[]) AS numbers) DELETE
FROM plain_job
WHERE plain_job.task_id = (SELECT plain_job.task_id
FROM plain_job
WHERE plain_job.task_id = (SELECT named.numbers[1] AS anon_1
FROM named) AND CAST(CAST(plain_job.xmin AS TEXT) AS BIGINT) = (SELECT named.numbers[2] AS anon_2
FROM named) AND CAST(CAST(plain_job.xmax AS TEXT) AS BIGINT) = (SELECT named.numbers[3] AS anon_3
FROM named) FOR UPDATE OF plain_job SKIP LOCKED)
RETURNING plain_job.task_id, CAST(plain_job.task_type AS TEXT) AS task_type, CAST(plain_job.params AS TEXT) AS params, greatest('0001-01-02', least(plain_job.created_at, '9999-01-02')) AS created_at, plain_job.tenant, plain_job.note, plain_job.attempts, plain_job.last_error, plain_job.coalesce_key, plain_job.lease_token, plain_job.priority, CAST(plain_job.* AS TEXT) AS pgtask_row, CAST(CAST(plain_job.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, false AS pgtask_touched, set_config('application_name', left(concat('pgtask ', plain_job.task_id, ' ', plain_job.task_type), 63), true) AS pgtask_announced
