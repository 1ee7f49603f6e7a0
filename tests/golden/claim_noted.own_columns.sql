WITH named AS MATERIALIZED (SELECT plain_job_worker.task_ids[1] AS task_id, plain_job_worker.row_versions[1] AS version, plain_job_worker.xmin AS noted_by
FROM plain_job_worker
WHERE plain_job_worker.worker_id = %(worker_id)s::INTEGER AND plain_job_worker.lane = %(number)s::INTEGER), chosen AS MATERIALIZED (SELECT plain_job.task_id AS task_id, false AS touched
FROM plain_job
WHERE plain_job.task_id = (SELECT named.task_id
FROM named) AND CAST(CAST(plain_job.xmin AS TEXT) AS BIGINT) = abs((SELECT named.version
FROM named)) AND plain_job.xmax = (SELECT named.noted_by
FROM named) FOR UPDATE OF plain_job SKIP LOCKED) DELETE
FROM plain_job
WHERE plain_job.task_id = (SELECT chosen.task_id
FROM chosen)
RETURNING plain_job.task_id, CAST(plain_job.task_type AS TEXT) AS task_type, CAST(plain_job.params AS TEXT) AS params, greatest('0001-01-02', least(plain_job.created_at, '9999-01-02')) AS created_at, plain_job.tenant, plain_job.note, plain_job.attempts, plain_job.last_error, plain_job.coalesce_key, plain_job.lease_token, plain_job.priority, CAST(plain_job.* AS TEXT) AS pgtask_row, CAST(CAST(plain_job.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched, set_config('application_name', left(concat('pgtask ', plain_job.task_id, ' ', plain_job.task_type), 63), true) AS pgtask_announced
