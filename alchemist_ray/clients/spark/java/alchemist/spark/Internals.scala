package org.apache.spark.sql.execution.columnar

import java.nio.ByteBuffer

import org.apache.spark.rdd.RDD
import org.apache.spark.scheduler.ExecutorCacheTaskLocation
import org.apache.spark.sql.{Dataset, Row, SparkSession}
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.execution.columnar.compression.PassThrough
import org.apache.spark.sql.execution.vectorized.WritableColumnVector
import org.apache.spark.sql.types.DataType
import org.apache.spark.storage.StorageUtils

/** What Alchemist uses of Spark that is private to Spark's packages; all of it is here. */
object Internals {
  /** The number of the encoding of values that are stored as they are. */
  val plain: Int = PassThrough.typeId

  /** A plan as a frame, in the session of another, or in a copy of it with more settings. */
  def frame(plan: LogicalPlan, like: SparkSession, settings: (String, String)*): Dataset[Row] = {
    val session = if (settings.isEmpty) like else like.cloneSession()
    settings.foreach { case (key, value) => session.conf.set(key, value) }
    Dataset.ofRows(session, plan)
  }

  /** Decode a column of Spark's cache. */
  def decode(stored: Array[Byte], into: WritableColumnVector, kind: DataType, rows: Int): Unit =
    ColumnAccessor.decompress(stored, into, kind, rows)

  /** The executor that has a partition in its memory. */
  def executor(rdd: RDD[_], partition: Int): Option[String] =
    rdd.context.getPreferredLocs(rdd, partition).headOption.collect {
      case place: ExecutorCacheTaskLocation => place.toString
    }

  /** Unmap a buffer. */
  def dispose(buffer: ByteBuffer): Unit = StorageUtils.dispose(buffer)
}
