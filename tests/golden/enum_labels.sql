SELECT CAST(unnest(enum_range(CAST(NULL AS jobs.kind))) AS TEXT) AS unnest_1
