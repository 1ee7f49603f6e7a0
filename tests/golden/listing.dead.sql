SELECT dead_task.task_id, CAST(dead_task.task_type AS TEXT) AS task_type, CAST(dead_task.params AS TEXT) AS params, CASE WHEN (dead_task.created_at IS NOT NULL) THEN greatest('0001-01-02', least(dead_task.created_at, '9999-01-02')) END AS created_at, dead_task.attempts, dead_task.last_error, dead_task.reason, CASE WHEN (dead_task.buried_at IS NOT NULL) THEN greatest('0001-01-02', least(dead_task.buried_at, '9999-01-02')) END AS buried_at, dead_task.priority
FROM dead_task
WHERE CAST(dead_task.task_type AS TEXT) = %(param_1)s::VARCHAR
ORDER BY dead_task.task_id
LIMIT %(param_2)s::INTEGER
