SELECT task.task_id
FROM task JOIN jsonb_populate_record(CAST(%(pgtask_row)s::VARCHAR AS task), jsonb_build_object()) AS restored ON true
WHERE task.task_type = restored.task_type AND task.coalesce_key = restored.coalesce_key AND task.params = restored.params AND (task.run_at IS NULL OR task.run_at <= statement_timestamp() + %(pgtask_delay)s) AND task.lease_token IS NULL
LIMIT %(param_1)s::INTEGER FOR KEY SHARE OF task SKIP LOCKED
