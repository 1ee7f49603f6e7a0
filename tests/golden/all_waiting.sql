SELECT task.task_id, CAST(task.task_type AS TEXT) AS task_type, task.params, CASE WHEN (task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(task.created_at, '9999-01-02')) END AS created_at, CASE WHEN (task.run_at IS NOT NULL) THEN greatest('0001-01-02', least(task.run_at, '9999-01-02')) END AS run_at, task.attempts, task.last_error, task.priority
FROM task
ORDER BY task.task_id
