WITH waiting AS MATERIALIZED (SELECT newest.task_id AS task_id, newest.priority AS priority, newest.task_type AS task_type, newest.run_at AS run_at
FROM (SELECT jobs.enum_job.task_id AS task_id, jobs.enum_job.priority AS priority, jobs.enum_job.task_type AS task_type, jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.task_id BETWEEN (SELECT CAST(%(floor)s AS BIGINT) AS anon_1) AND 9223372036854775807 AND array_position(CAST(%(mine)s::TEXT[] AS jobs.kind[]), jobs.enum_job.task_type) IS NOT NULL AND coalesce(jobs.enum_job.run_at, '-infinity') <= statement_timestamp()
ORDER BY jobs.enum_job.task_id
LIMIT 200) AS newest UNION
SELECT fallen_due.task_id AS task_id, fallen_due.priority AS priority, fallen_due.task_type AS task_type, fallen_due.run_at AS run_at
FROM (SELECT due.task_id AS task_id, due.priority AS priority, due.task_type AS task_type, due.run_at AS run_at
FROM unnest((SELECT CAST(%(levels)s::INTEGER[] AS SMALLINT[]) AS anon_2), (SELECT CAST(%(types)s::TEXT[] AS jobs.kind[]) AS anon_3)) AS turns(level, kind) JOIN LATERAL (SELECT jobs.enum_job.task_id AS task_id, jobs.enum_job.priority AS priority, jobs.enum_job.task_type AS task_type, jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.priority = turns.level AND jobs.enum_job.task_type = turns.kind AND jobs.enum_job.run_at BETWEEN (SELECT to_timestamp(CAST(%(since)s AS DOUBLE PRECISION)) AS to_timestamp_1) AND statement_timestamp()
ORDER BY jobs.enum_job.run_at
LIMIT 200) AS due ON true) AS fallen_due UNION
SELECT others.task_id AS task_id, others.priority AS priority, others.task_type AS task_type, others.run_at AS run_at
FROM (SELECT one.task_id AS task_id, one.priority AS priority, one.task_type AS task_type, one.run_at AS run_at
FROM unnest((SELECT CAST(%(others)s::BIGINT[] AS BIGINT[]) AS anon_4)) AS given(number) JOIN LATERAL (SELECT jobs.enum_job.task_id AS task_id, jobs.enum_job.priority AS priority, jobs.enum_job.task_type AS task_type, jobs.enum_job.run_at AS run_at
FROM jobs.enum_job
WHERE jobs.enum_job.task_id = given.number AND coalesce(jobs.enum_job.run_at, '-infinity') <= statement_timestamp()
LIMIT 1) AS one ON true) AS others), chosen AS MATERIALIZED (SELECT picked.task_id AS task_id, picked.touched AS touched
FROM (SELECT waiting.task_id AS task_id
FROM waiting JOIN unnest((SELECT CAST(%(levels)s::INTEGER[] AS SMALLINT[]) AS anon_5), (SELECT CAST(%(types)s::TEXT[] AS jobs.kind[]) AS anon_6)) WITH ORDINALITY AS turns(level, kind, place) ON waiting.priority = turns.level AND waiting.task_type = turns.kind
ORDER BY turns.place, (waiting.run_at IS NULL) != CAST(%(new_first)s AS BOOLEAN), waiting.run_at, random()) AS found JOIN LATERAL (SELECT jobs.enum_job.task_id AS task_id, xmax <> '0'::xid AS touched
FROM jobs.enum_job
WHERE jobs.enum_job.task_id = found.task_id AND coalesce(jobs.enum_job.run_at, '-infinity') <= statement_timestamp() FOR UPDATE SKIP LOCKED) AS picked ON true
LIMIT 10) DELETE
FROM jobs.enum_job
WHERE jobs.enum_job.task_id = ANY (array((SELECT chosen.task_id
FROM chosen)))
RETURNING jobs.enum_job.task_id, CAST(jobs.enum_job.params AS TEXT) AS params, greatest('0001-01-02', least(jobs.enum_job.created_at, '9999-01-02')) AS created_at, CAST(jobs.enum_job.task_type AS TEXT) AS task_type, jobs.enum_job.attempts, jobs.enum_job.last_error, jobs.enum_job.coalesce_key, jobs.enum_job.lease_token, jobs.enum_job.priority, CAST(enum_job.* AS TEXT) AS pgtask_row, CAST(CAST(enum_job.xmin AS TEXT) AS BIGINT) AS pgtask_version, pg_backend_pid() AS pgtask_pid, CAST(transaction_timestamp() AS TEXT) AS pgtask_begun, (SELECT bool_or(chosen.touched) AS bool_or_1
FROM chosen) AS pgtask_touched
