package alchemist.spark

import java.lang.ref.{PhantomReference, ReferenceQueue}
import java.util.concurrent.ConcurrentHashMap

import org.apache.spark.mllib.linalg.distributed._
import org.apache.spark.sql.Dataset
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation

/** Numbers of objects that the program has dropped: `poll` has them after Java's garbage collection. */
final class Dropped {
  private val queue = new ReferenceQueue[AnyRef]
  private val references = ConcurrentHashMap.newKeySet[Dropped.Numbered]()

  def watch(made: AnyRef, number: Long): Unit =
    references.add(new Dropped.Numbered(made, queue, number))

  /** Watch what reads a matrix for an object of Spark. All that Spark derives of the object refers to
    * it: RDDs by their lineage, frames by their plans.
    */
  def watchSource(made: Any, number: Long): Unit = watch(made match {
    case matrix: RowMatrix => matrix.rows
    case matrix: IndexedRowMatrix => matrix.rows
    case matrix: CoordinateMatrix => matrix.entries
    case matrix: BlockMatrix => matrix.blocks
    case frame: Dataset[_] =>
      frame.queryExecution.analyzed.collectFirst { case its: DataSourceV2Relation => its.table }.get
  }, number)

  /** The number of an object that was collected since the last call, or -1. */
  def poll(): Long = queue.poll() match {
    case found: Dropped.Numbered =>
      references.remove(found)
      found.number
    case _ => -1
  }
}

private object Dropped {
  final class Numbered(made: AnyRef, queue: ReferenceQueue[AnyRef], val number: Long)
      extends PhantomReference[AnyRef](made, queue)
}
