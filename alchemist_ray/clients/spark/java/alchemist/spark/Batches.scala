package alchemist.spark

import org.apache.spark.api.java.JavaRDD
import org.apache.spark.rdd.RDD
import org.apache.spark.sql.{Dataset, Row}
import org.apache.spark.sql.catalyst.expressions.{Alias, Attribute, ExprId, NamedExpression}
import org.apache.spark.sql.catalyst.plans.QueryPlan
import org.apache.spark.sql.catalyst.plans.logical.{LogicalPlan, Project}
import org.apache.spark.sql.execution.{
  ColumnarToRowExec, InputAdapter, ProjectExec, SparkPlan, WholeStageCodegenExec}
import org.apache.spark.sql.execution.columnar.{
  DefaultCachedBatchSerializer, InMemoryRelation, InMemoryTableScanExec}

/** The rows of a DataFrame that Spark has in columns, as in its cache, before it makes rows of them. */
final class Batches private (batches: RDD[_], places: Seq[Int]) {
  def rdd: JavaRDD[_] = batches.toJavaRDD()

  /** The place of each column of the DataFrame in a batch, as JSON: py4j would ask for each. */
  def ordinals: String = places.mkString("[", ",", "]")
}

object Batches {

  /** Batches of Spark's cache as it stores them; null if the frame is not just that. */
  def stored(frame: Dataset[Row]): Batches = {
    def find(plan: LogicalPlan, columns: Seq[ExprId]): Option[Batches] = plan match {
      case Project(made, child) => sources(columns, made).flatMap(find(child, _))
      case cache: InMemoryRelation
          if cache.cacheBuilder.serializer.getClass == classOf[DefaultCachedBatchSerializer] =>
        places(columns, cache).map(new Batches(cache.cacheBuilder.cachedColumnBuffers, _))
      case _ => None
    }
    val plan = frame.queryExecution.withCachedData // Spark keeps it with the frame
    find(plan, plan.output.map(_.exprId)).orNull
  }

  /** Batches that Spark makes of its cache or of files; null if it computes the rows, and does more
    * than to rename and to choose columns. Adaptive execution would hide the plan.
    */
  def of(fixed: Dataset[Row]): Batches = {
    def find(plan: SparkPlan, columns: Seq[ExprId]): Option[Batches] = plan match {
      case scan: InMemoryTableScanExec // Spark makes rows of a wide one, but has it in columns too
          if scan.relation.cacheBuilder.serializer.supportsColumnarOutput(scan.relation.schema) =>
        places(columns, scan).map(new Batches(scan.executeColumnar(), _))
      case other if other.supportsColumnar =>
        places(columns, other).map(new Batches(other.executeColumnar(), _))
      case ProjectExec(made, child) => sources(columns, made).flatMap(find(child, _))
      case _: WholeStageCodegenExec | _: InputAdapter | _: ColumnarToRowExec =>
        find(plan.children.head, columns)
      case _ => None
    }
    val plan = fixed.queryExecution.executedPlan
    find(plan, plan.output.map(_.exprId)).orNull
  }

  /** The places of columns in the output of a plan, if all are there. */
  private def places(columns: Seq[ExprId], plan: QueryPlan[_]): Option[Seq[Int]] =
    all(columns, plan.output.map(_.exprId).zipWithIndex.toMap.get(_: ExprId))

  /** The columns of which a projection makes these, unless it computes. */
  private def sources(columns: Seq[ExprId], made: Seq[NamedExpression]): Option[Seq[ExprId]] = {
    val of = made.map(named => named.exprId -> named).toMap
    all(columns, (column: ExprId) => of.get(column).collect {
      case attribute: Attribute => attribute.exprId
      case Alias(attribute: Attribute, _) => attribute.exprId
    })
  }

  private def all[T](columns: Seq[ExprId], find: ExprId => Option[T]): Option[Seq[T]] = {
    val found = columns.flatMap(find(_))
    if (found.size == columns.size) Some(found) else None
  }
}
