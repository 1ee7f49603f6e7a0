SELECT count(*) AS count_1
FROM task
WHERE (EXISTS (SELECT %(param_1)s::INTEGER AS anon_1
FROM unnest(CAST(%(types)s::TEXT[] AS TEXT[])) AS kinds(kind)
WHERE task.task_type = kinds.kind)) AND (task.run_at IS NULL OR task.run_at <= statement_timestamp())
