SELECT CAST(pg_catalog.pg_attribute.attname AS TEXT) AS attname
FROM pg_catalog.pg_attribute
WHERE pg_catalog.pg_attribute.attrelid = to_regclass(quote_ident(%(quote_ident_1)s)) AND pg_catalog.pg_attribute.attnum > %(attnum_1)s::INTEGER AND NOT pg_catalog.pg_attribute.attisdropped AND pg_catalog.pg_attribute.attgenerated = ''
ORDER BY pg_catalog.pg_attribute.attnum
