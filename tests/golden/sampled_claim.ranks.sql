WITH chosen AS MATERIALIZED (SELECT sampled.task_id AS task_id, xmax <> '0'::xid AS touched
FROM jobs.enum_job AS sampled TABLESAMPLE system(%(system_1)s)
WHERE sampled.task_type = ANY (CAST(%(types)s::TEXT[] AS jobs.kind[])) AND (sampled.run_at IS NULL OR sampled.run_at <= statement_timestamp())
ORDER BY sampled.priority, CASE CAST(sampled.task_type AS TEXT) WHEN %(param_1)s::VARCHAR THEN -1 WHEN %(param_2)s::VARCHAR THEN 5 ELSE 0 END, random()
LIMIT 5 FOR UPDATE SKIP LOCKED) DELETE
FROM jobs.enum_job
WHERE jobs.enum_job.task_id = ANY (array((SELECT chosen.task_id
FROM chosen)))
RETURNING jobs.enum_job.task_id, CAST(jobs.enum_job.params AS TEXT) AS params, greatest('0001-01-02', least(jobs.enum_job.created_at, '9999-01-02')) AS created_at, CAST(jobs.enum_job.task_type AS TEXT) AS task_type, jobs.enum_job.attempts, jobs.enum_job.last_error, jobs.enum_job.coalesce_key, jobs.enum_job.lease_token, jobs.enum_job.priority, CAST(enum_job.* AS TEXT) AS pgtask_row, CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched
