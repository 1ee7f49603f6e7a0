WITH waiting AS MATERIALIZED (SELECT newest.task_id AS task_id, newest.priority AS priority, newest.task_type AS task_type, newest.run_at AS run_at
FROM (SELECT task.task_id AS task_id, task.priority AS priority, task.task_type AS task_type, task.run_at AS run_at
FROM task
WHERE task.task_id BETWEEN (SELECT CAST(%(floor)s AS BIGINT) AS anon_1) AND 9223372036854775807 AND array_position(CAST(%(mine)s::TEXT[] AS TEXT[]), task.task_type) IS NOT NULL AND coalesce(task.run_at, '-infinity') <= statement_timestamp()
ORDER BY task.task_id
LIMIT 1000) AS newest UNION
SELECT fallen_due.task_id AS task_id, fallen_due.priority AS priority, fallen_due.task_type AS task_type, fallen_due.run_at AS run_at
FROM (SELECT due.task_id AS task_id, due.priority AS priority, due.task_type AS task_type, due.run_at AS run_at
FROM unnest((SELECT CAST(%(levels)s::INTEGER[] AS SMALLINT[]) AS anon_2), (SELECT CAST(%(types)s::TEXT[] AS TEXT[]) AS anon_3)) AS turns(level, kind) JOIN LATERAL (SELECT task.task_id AS task_id, task.priority AS priority, task.task_type AS task_type, task.run_at AS run_at
FROM task
WHERE task.priority = turns.level AND task.task_type = turns.kind AND task.run_at BETWEEN (SELECT to_timestamp(CAST(%(since)s AS DOUBLE PRECISION)) AS to_timestamp_1) AND statement_timestamp()
ORDER BY task.run_at
LIMIT 1000) AS due ON true) AS fallen_due UNION
SELECT others.task_id AS task_id, others.priority AS priority, others.task_type AS task_type, others.run_at AS run_at
FROM (SELECT one.task_id AS task_id, one.priority AS priority, one.task_type AS task_type, one.run_at AS run_at
FROM unnest((SELECT CAST(%(others)s::BIGINT[] AS BIGINT[]) AS anon_4)) AS given(number) JOIN LATERAL (SELECT task.task_id AS task_id, task.priority AS priority, task.task_type AS task_type, task.run_at AS run_at
FROM task
WHERE task.task_id = given.number AND coalesce(task.run_at, '-infinity') <= statement_timestamp()
LIMIT 1) AS one ON true) AS others)
SELECT waiting.task_id AS task_id, waiting.priority AS level, CAST(waiting.task_type AS TEXT) AS kind, CAST(EXTRACT(epoch
FROM waiting.run_at) AS DOUBLE PRECISION) AS due, CAST(NULL AS BIGINT) AS dead
FROM waiting
UNION ALL
SELECT coalesce(CASE WHEN has_sequence_privilege(pg_get_serial_sequence('task', 'task_id'), 'usage, select') THEN pg_sequence_last_value(CAST(pg_get_serial_sequence('task', 'task_id') AS REGCLASS)) END, (SELECT max(task.task_id) AS max_1
FROM task
WHERE task.task_id BETWEEN (SELECT CAST(%(floor)s AS BIGINT) AS anon_5) AND 9223372036854775807)) AS coalesce_1, CAST(NULL AS INTEGER) AS anon_6, CAST(NULL AS TEXT) AS anon__1, CAST(EXTRACT(epoch
FROM statement_timestamp()) AS DOUBLE PRECISION) AS anon_7, CAST(coalesce((SELECT sum(pg_stat_get_dead_tuples(parts.relid)) AS sum_1
FROM pg_partition_tree(to_regclass(quote_ident(%(quote_ident_1)s))) AS parts), pg_stat_get_dead_tuples(to_regclass(quote_ident(%(quote_ident_2)s)))) AS BIGINT) AS coalesce_2
