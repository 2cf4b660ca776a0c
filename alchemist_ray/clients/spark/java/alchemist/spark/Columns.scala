package alchemist.spark

import java.util.Arrays

import scala.collection.JavaConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.mllib.linalg.{DenseVector, SparseVector, Vector}
import org.apache.spark.mllib.linalg.distributed.IndexedRow
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeArrayData, UnsafeRow}
import org.apache.spark.sql.catalyst.util.ArrayData
import org.apache.spark.sql.execution.columnar.{DefaultCachedBatch, Internals}
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector
import org.apache.spark.sql.vectorized.{ColumnVector, ColumnarArray, ColumnarBatch}
import org.apache.spark.unsafe.Platform

/** Reads rows of Spark's internal form, and of MLlib, as elements of a matrix. */
private[spark] final class Columns(json: JsonNode, element: Element) {
  val all: Array[Column] = json.asScala.map(new Column(_)).toArray

  /** All columns are 8 bytes that are the element's own. */
  private val words = element.nbytes == 8 && all.forall(column => column.scalar && column.same)

  /** Copy a row to `at` in a block. */
  def read(row: Any, block: Array[Byte], at: Int): Unit = row match {
    case packed: UnsafeRow if words && !packed.anyNull =>
      val bits = UnsafeRow.calculateBitSetWidthInBytes(packed.numFields)
      Platform.copyMemory(
        packed.getBaseObject, packed.getBaseOffset + bits,
        block, Block.BASE + at, 8L * all.length)
    case fields: InternalRow =>
      var k = 0
      var to = at
      while (k < all.length) {
        all(k).read(fields, k, block, to)
        to += all(k).width * element.nbytes
        k += 1
      }
    case numbered: IndexedRow => all(0).read(numbered.vector, block, at)
    case vector: Vector => all(0).read(vector, block, at)
  }

  /** A column of Spark, and its elements in a row of the matrix. */
  final class Column(json: JsonNode) {
    val name: String = json.get("name").asText
    val width: Int = json.get("width").asInt
    val scalar: Boolean = json.get("kind").asText == "scalar"
    private val isVector = json.get("kind").asText == "vector" // a list if neither
    private val from = Element.of(json.get("type").asText) // of vectors and lists, their elements
    private val ordinal = json.path("ordinal").asInt // in a batch

    /** Whether its elements are stored as those of the matrix. */
    val same: Boolean = from == element

    def read(row: InternalRow, field: Int, block: Array[Byte], at: Int): Unit = {
      if (row.isNullAt(field)) throw nulls
      if (scalar) {
        element.store(block, at, row, field, from, name)
      } else if (!isVector) {
        val list = row.getArray(field)
        for (j <- 0 until list.numElements) if (list.isNullAt(j)) throw nulls
        values(list, block, at)
      } else {
        val vector = row.getStruct(field, 4)
        if (vector.getByte(0) == SPARSE) {
          sparse(vector.getInt(1), vector.getArray(2).toIntArray, vector.getArray(3).toDoubleArray,
            block, at)
        } else {
          values(vector.getArray(3), block, at)
        }
      }
    }

    def read(vector: Vector, block: Array[Byte], at: Int): Unit = vector match {
      case dense: DenseVector =>
        checkWidth(dense.size)
        element.store(block, at, dense.values, name)
      case some: SparseVector => sparse(some.size, some.indices, some.values, block, at)
    }

    private def sparse(
        size: Int, indices: Array[Int], values: Array[Double], block: Array[Byte],
        at: Int): Unit = {
      checkWidth(size)
      Arrays.fill(block, at, at + width * element.nbytes, 0.toByte)
      for (j <- indices.indices) {
        element.store(block, at + indices(j) * element.nbytes, values(j), name)
      }
    }

    private def values(list: ArrayData, block: Array[Byte], at: Int): Unit = {
      val count = list.numElements
      checkWidth(count)
      list match {
        case packed: UnsafeArrayData if same =>
          val start =
            packed.getBaseOffset + UnsafeArrayData.calculateHeaderPortionInBytes(count)
          Platform.copyMemory(
            packed.getBaseObject, start, block, Block.BASE + at, count.toLong * element.nbytes)
        case _ =>
          for (j <- 0 until count) {
            element.store(block, at + j * element.nbytes, list, j, from, name)
          }
      }
    }

    private def checkWidth(found: Int): Unit = if (found != width) {
      throw Failure("ShapeError", s"column '$name' has a row of $found elements where others have " +
        s"$width: the rows of a matrix must have the same length")
    }

    private def nulls: Failure =
      Failure("DtypeError", s"column '$name' has nulls, which a matrix cannot represent: fill or " +
        "drop them first (df.na.fill, df.na.drop)")

    /** The values of this column of scalars in a batch of Spark's cache, and their first byte.
      *
      * The cache has the number of its nulls and their places, the number of an encoding, and the
      * encoded values, in the byte order of the machine. Values that are neither encoded nor to be
      * converted are given as they are; Spark decodes others.
      */
    def stored(batch: DefaultCachedBatch): (Array[Byte], Int) = {
      val buffer = batch.buffers(ordinal)
      if (Platform.getInt(buffer, Block.BASE) > 0) throw nulls
      val encoding = Platform.getInt(buffer, Block.BASE + 4)
      if (same && encoding == Internals.plain) (buffer, HEADER_BYTES)
      else (decoded(buffer, batch.numRows), 0)
    }

    private var reused = Array.emptyByteArray

    private def decoded(buffer: Array[Byte], rows: Int): Array[Byte] = {
      if (reused.length < rows * element.nbytes) reused = new Array(rows * element.nbytes)
      val vector = new OnHeapColumnVector(rows, from.sparkType)
      try {
        Internals.decode(buffer, vector, from.sparkType, rows)
        read(vector, 0, rows, reused, 0)
      } finally vector.close()
      reused
    }

    /** Copy rows [start, start + count) of this column of scalars. */
    private def read(
        vector: ColumnVector, start: Int, count: Int, block: Array[Byte], at: Int): Unit = {
      if (vector.hasNull && (start until start + count).exists(vector.isNullAt)) throw nulls
      if (same && element == Element.Float64) {
        element.store(block, at, vector.getDoubles(start, count), name)
      } else {
        val values = new ColumnarArray(vector, start, count)
        var j = 0
        while (j < count) {
          element.store(block, at + j * element.nbytes, values, j, from, name)
          j += 1
        }
      }
    }

    def read(batch: ColumnarBatch, start: Int, count: Int, block: Array[Byte], at: Int): Unit =
      read(batch.column(ordinal), start, count, block, at)
  }

  private val SPARSE: Byte = 0
  private val HEADER_BYTES = 8 // of a column in the cache, without nulls

  private val values = new Array[Array[Byte]](all.length) // of a batch
  private val first = new Array[Int](all.length)

  /** Columns of batches that were not decoded. */
  var direct = 0L

  /** Send a batch of Spark's cache, whose first row is `row` of the matrix, from where it is stored.
    */
  def send(batch: DefaultCachedBatch, row: Long, block: Block): Unit = {
    val began = System.nanoTime
    val parts = block.parts(row, batch.numRows)
    var k = 0
    while (k < all.length) {
      val (its, start) = all(k).stored(batch)
      values(k) = its
      first(k) = start
      if (start > 0) direct += 1
      var p = 0
      while (p < parts.length) {
        parts(p).put(k, its, start)
        p += 1
      }
      k += 1
    }
    block.took(began)
    if (block.far) {
      for (start <- 0 until batch.numRows by block.capacity) {
        val count = math.min(block.capacity, batch.numRows - start)
        val nbytes = count * element.nbytes
        for (k <- all.indices) {
          System.arraycopy(
            values(k), first(k) + start * element.nbytes, block.bytes, k * nbytes, nbytes)
        }
        val region = Region(row + start, row + start + count, 0, all.length)
        block.stream(region, byRow = false, block.bytes, 0)
      }
    }
  }

  /** Send a batch that Spark has decoded, in parts that fit a block. */
  def send(batch: ColumnarBatch, row: Long, block: Block): Unit =
    for (start <- 0 until batch.numRows by block.capacity) {
      val count = math.min(block.capacity, batch.numRows - start)
      for (k <- all.indices) {
        all(k).read(batch, start, count, block.bytes, k * count * element.nbytes)
      }
      block.put(Region(row + start, row + start + count, 0, all.length), block.bytes)
    }
}
