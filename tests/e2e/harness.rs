//! The harness itself: what it starts answers, and is gone afterwards.

use threadgate_shared::store::postgres::{PgOptions, PgStore};
use threadgate_shared::store::{Graphs, Schema};
use threadgate_tests::{Postgres, Redis};

#[tokio::test]
async fn each_test_has_a_database_of_its_own() {
    let postgres = Postgres::shared().await;

    let (first, second) = (postgres.empty_database().await, postgres.empty_database().await);

    let first_pool = sqlx::PgPool::connect(&first.url).await.unwrap();
    sqlx::raw_sql("create table only_here (id int)").execute(&first_pool).await.unwrap();
    let second_pool = sqlx::PgPool::connect(&second.url).await.unwrap();
    let tables: i64 = sqlx::query_scalar("select count(*) from pg_tables where tablename = 'only_here'")
        .fetch_one(&second_pool)
        .await
        .unwrap();
    assert_eq!(tables, 0);
}

#[tokio::test]
async fn a_database_has_the_current_schema() {
    let database = Postgres::shared().await.database().await;

    let store = PgStore::connect(&database.url, &PgOptions::default()).await.unwrap();

    store.check_schema().await.unwrap();
    assert_eq!(store.graphs().await.unwrap(), []);
}

#[tokio::test]
async fn a_killed_redis_comes_back_empty() {
    let mut redis = Redis::private().await;
    let mut connection = redis.connect().await;
    redis::cmd("SET").arg("key").arg(1).exec_async(&mut connection).await.unwrap();

    redis.kill();
    redis.start_again().await;

    let mut connection = redis.connect().await;
    let size: i64 = redis::cmd("DBSIZE").query_async(&mut connection).await.unwrap();
    assert_eq!(size, 0);
}

#[tokio::test]
async fn a_killed_postgres_comes_back_with_what_was_committed() {
    let mut postgres = Postgres::private().await;
    let database = postgres.empty_database().await;
    let pool = sqlx::PgPool::connect(&database.url).await.unwrap();
    sqlx::raw_sql("create table kept (id int); insert into kept values (7)").execute(&pool).await.unwrap();

    postgres.kill();
    postgres.start_again().await;

    let pool = sqlx::PgPool::connect(&database.url).await.unwrap();
    let kept: i32 = sqlx::query_scalar("select id from kept").fetch_one(&pool).await.unwrap();
    assert_eq!(kept, 7);
}

#[tokio::test]
async fn a_dropped_server_leaves_no_folder() {
    let redis = Redis::private().await;
    let folder = redis.folder().unwrap();
    assert!(folder.exists());

    drop(redis);

    assert!(!folder.exists());
}
